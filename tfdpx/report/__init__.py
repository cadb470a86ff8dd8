"""The files that a run leaves for people: record, statement, page, card and pictures."""
