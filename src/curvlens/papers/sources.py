"""What is reproduced, by the names that the pages give it."""

PAPER = "What does it mean to be a Transformer?"
SLIDES = f"slides on {PAPER}"
SECOND = "Closing the curvature gap"
ARTICLE = "article on the full block"
NOISE_SCALE = "arXiv 1812.06162"
GD_EDGE = "arXiv 2103.00065"
ADAM_EDGE = "arXiv 2207.14484"
BLOCK_ORDER = "arXiv 2502.19002"
HETEROGENEITY = "arXiv 2402.16788"
OUTLIERS = "arXiv 1901.08244"
CITED = {
    PAPER: "What Does It Mean to Be a Transformer? Insights from a Theoretical Hessian Analysis, and W. Ormaniec's "
    "slides on it",
    SECOND: "E. Petrov, N. Kiselev, V. Meshkov, A. Grabovoy: Closing the Curvature Gap: Full Transformer Hessians and "
    "Their Implications for Scaling Laws, arXiv 2510.16927 (2025)",
    ARTICLE: "Transformer Full Block Hessian Analysis, an article that sketches software for the second paper",
    NOISE_SCALE: "S. McCandlish, J. Kaplan, D. Amodei: An Empirical Model of Large-Batch Training (2018)",
    GD_EDGE: "J. M. Cohen, S. Kaur, Y. Li, J. Z. Kolter, A. Talwalkar: Gradient Descent on Neural Networks Typically "
    "Occurs at the Edge of Stability (2021)",
    ADAM_EDGE: "J. M. Cohen et al.: Adaptive Gradient Methods at the Edge of Stability (2022)",
    BLOCK_ORDER: "J. Wang et al.: The Sharpness Disparity Principle in Transformers for Accelerating Language Model "
    "Pre-Training (2025)",
    HETEROGENEITY: "Y. Zhang et al.: Why Transformers Need Adam: A Hessian Perspective (2024)",
    OUTLIERS: "V. Papyan: Measurements of Three-Level Hierarchical Structure in the Outliers in the Spectrum of "
    "Deepnet Hessians (2019)",
}
"""What is meant by them."""
