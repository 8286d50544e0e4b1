"""What holds for all tests."""

import os
import signal

# A shell starts what goes on in the background, and nohup its command, with Ctrl-C ignored, and children inherit that:
# tests that press it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Where nothing answers, a question to Hugging Face's Hub is asked again for 23 s. Its libraries read this when they
# are imported, by whichever test comes first.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
