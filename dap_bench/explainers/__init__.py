"""One file per explainer: a function (vit, images, classes, layers=False, **options) -> Explanation."""
