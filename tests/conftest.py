"""What holds for all tests."""

import signal

# A shell starts what goes on in the background, and nohup its command, with Ctrl-C ignored, and children inherit that:
# tests that press it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
