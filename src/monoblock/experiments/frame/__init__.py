"""What all experiments share: the records that describe them, their results, the runner, rules, tables and plots."""
