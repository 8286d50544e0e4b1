"""What the benchmarks share: rows and their table (`table`), the jobs they start (`jobs`), the machine (`machine`)."""
