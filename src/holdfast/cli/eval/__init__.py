"""`holdfast eval`: `command` has the group, `options` what its commands share, `progress` and `report` print."""
