"""What is reproduced, by the names that the pages give it."""

PAPER = "What does it mean to be a Transformer?"
SLIDES = f"slides on {PAPER}"
SECOND = "Closing the curvature gap"
ARTICLE = "article on the full block"
NOISE_SCALE = "arXiv 1812.06162"
CITED = {
    PAPER: "What Does It Mean to Be a Transformer? Insights from a Theoretical Hessian Analysis, and W. Ormaniec's "
    "slides on it",
    SECOND: "E. Petrov, N. Kiselev, V. Meshkov, A. Grabovoy: Closing the Curvature Gap: Full Transformer Hessians and "
    "Their Implications for Scaling Laws, arXiv 2510.16927 (2025)",
    ARTICLE: "Transformer Full Block Hessian Analysis, an article that sketches software for the second paper",
    NOISE_SCALE: "S. McCandlish, J. Kaplan, D. Amodei: An Empirical Model of Large-Batch Training (2018)",
}
"""What is meant by them."""
