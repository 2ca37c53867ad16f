"""The model file that the package ships."""
