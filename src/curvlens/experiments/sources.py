"""What is reproduced, by the names that the pages give it."""

PAPER = "What does it mean to be a Transformer?"
SLIDES = f"slides on {PAPER}"
SECOND = "Closing the curvature gap"
ARTICLE = "article on the full block"
