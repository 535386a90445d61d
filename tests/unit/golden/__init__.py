"""Holds every kind of document, message and name that is stored, sent or shown, as fixed text.

The files of `tests/fixtures/golden` are what the code made when they were written. Each module here
makes some families of them: `stored` what is in etcd and in checkpoints, `sent` what agents,
workers and ranks send, `shown` what people and their programs read. To write the files anew, run
`pytest tests/unit/golden --update`, and read the difference.
"""
