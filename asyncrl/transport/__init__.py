"""ZeroMQ links between the processes of a run: framed, schema-checked, credited, acknowledged. See ``links``."""
