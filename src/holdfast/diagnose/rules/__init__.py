"""Match lines of logs with rules (`topics/`, `tables/`), and define possible causes (`causes.yaml`)."""
