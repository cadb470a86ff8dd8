"""Replicas and hosts: who takes which rows, and whether they agree."""
