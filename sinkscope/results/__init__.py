"""The results of a run: tables, metrics, findings, folders."""
