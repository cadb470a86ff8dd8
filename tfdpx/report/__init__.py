"""Writes and checks the files of a run for people: record, statement, page, card and pictures."""
