"""The named norms: by a choice of axes, or by statistics that are changed or blended."""
