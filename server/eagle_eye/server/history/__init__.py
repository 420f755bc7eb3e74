"""Sample storage on disk: a journal of recent frames, segments of older ones, and an optional remote store.

In: frames and rows. Out: replays, queries, recordings; to the remote store remote write requests. Knows nothing of
detectors, incidents or actions.

A frame comes into the journal (``journal``, ``journal_reader``). Minutes later a process of its own (``compactor``)
makes it part of a segment, Parquet files whose form is in ``segment_tables``, with its ``minutes``; ``segment_files``
writes and reads them, ``segment_store`` knows which there are. ``embedded_history`` puts these together as the
``History`` of ``history``. ``remote_sender`` is the process that sends segments to the store of ``remote_store``.
"""
