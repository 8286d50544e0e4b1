"""`holdfast profile`: `command` profiles a command, `attach` a run that is going, `report` writes the page."""
