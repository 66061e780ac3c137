"""Batch runs: a file of requests answered into a file of records, which an interrupted run resumes."""
