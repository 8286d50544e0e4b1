"""Match lines with events (`topics/`, `tables/`), and causes with effects (`causes.yaml`)."""
