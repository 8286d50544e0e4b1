"""What a metric may need beyond arithmetic: a sandbox for generated code (`sandbox`), a judge under quota (`judge`)."""
