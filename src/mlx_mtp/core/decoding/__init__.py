"""Speculative decoding with the MTP head: the loop, the decoder's moves, sequences, windows, the planner and prefill."""
