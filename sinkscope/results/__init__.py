"""What a run leaves: tables, metrics, findings, folders."""
