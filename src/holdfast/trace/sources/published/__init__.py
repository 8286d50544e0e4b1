"""Read the published traces: Acme, Helios, PAI, Philly, openb."""
