"""An answer taken apart as it is written, and the grammars that it has to follow."""
