"""Show decisions to people, and accept people's own decisions.

| module | one idea |
|---|---|
| `modes` | the decisions to carry out at once, to propose, and only to record |
| `decisions` | one record of each decision, and the approvals that come through the run's folder |
| `signals` | the signals that were read after a failure, and the signals that could not be read |
| `messages` | the incidents for which a message is due, and the text of the message |
| `notifier` | sends the messages without delaying the supervision |
| `sender` | the process in which Apprise sends one message |
"""
