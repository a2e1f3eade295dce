"""Speculative decoding with the MTP head: the loop, the decoder's moves, acceptance, depth and sampling."""
