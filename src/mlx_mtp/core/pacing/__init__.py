"""The number of tokens to draft in a step, chosen by measured times."""

MAX_DRAFT_TOKENS = 8  # the head's drafts in a step
MAX_COPY_TOKENS = 16  # drafts in a window
MAX_WINDOW = MAX_COPY_TOKENS + 1  # tokens of a sequence in a window, the first of which is committed
