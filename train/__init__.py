"""Training of the embedded tiny model: data, tokenizer, trainer, export and evaluation (see flashstep/tiny/README.md)."""
