"""Segments: Parquet files of samples, with their manifest, compaction, downsampling and reading.

In: sealed chunks of the journal. Out: files, and their contents for queries.
"""
