"""What `monoblock bench --all` measures; the programs in benchmarks/ use the same runners."""
