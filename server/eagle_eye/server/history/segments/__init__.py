"""Segments: Parquet files of samples, their manifest, compaction, downsampling and reading.

In: sealed chunks of the journal. Out: files, and what queries find in them.
"""
