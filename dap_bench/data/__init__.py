"""Where images come from (sources), which ones (samplers), and the frozen sample set."""
