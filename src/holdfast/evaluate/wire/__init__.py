"""Connect the coordinator and its workers: messages over TCP, the journal, the folder lock."""
