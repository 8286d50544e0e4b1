"""What people see of the decisions, and what they decide themselves.

| module | one idea |
|---|---|
| `modes` | which decisions are carried out at once, which wait for an approval, and which are only recorded |
| `decisions` | one record of each decision, and the approvals that come through the run's folder |
| `signals` | which signals were looked at when something failed, and which could not be seen |
| `messages` | which incidents a message is due for, and its words |
| `notifier` | sends the messages, without holding up anything |
| `sender` | the process in which Apprise sends one message |
"""
