"""From records to tables, plots and pages; nothing here runs a model."""
