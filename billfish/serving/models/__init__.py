"""Several models behind one server: each has a process with its engine, started when the model is first asked for."""
