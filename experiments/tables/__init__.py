"""Private models of tables: generated tables, the fit of the rule, and the study."""
