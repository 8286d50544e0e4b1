"""Connect the coordinator and its workers: messages over TCP, the answers' journal, the folder's lock."""
