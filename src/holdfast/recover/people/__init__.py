"""Show decisions to people, and accept people's own decisions.

| module | one idea |
|---|---|
| `modes` | which decisions are carried out at once, proposed to a person, or only recorded |
| `decisions` | records each decision once, and reads approvals from the run's folder |
| `signals` | lists the signals that were read after a failure, and those that could not be read |
| `messages` | for which incidents a message is due, and the text of the message |
| `notifier` | sends the messages without delaying the supervision |
| `sender` | the process in which Apprise sends one message |
"""
