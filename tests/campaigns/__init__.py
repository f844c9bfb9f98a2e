"""Long runs that look for what short tests cannot show; started by hand or by make."""
