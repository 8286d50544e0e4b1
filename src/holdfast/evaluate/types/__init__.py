"""Define the data that the other packages exchange, and the Protocols of engine and harness."""
