"""Private models of tables: what `classify` does with --dataset=csv:PATH or parquet:PATH."""
