"""Figures as data, and as files for papers; `fedlens.pages.plotly_figures` draws them on pages."""
