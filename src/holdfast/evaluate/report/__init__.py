"""What an evaluation came to, for people and for the harness's tools."""
