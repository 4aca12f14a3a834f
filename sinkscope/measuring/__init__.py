"""One pass over the text: tracer, observables, summary."""
