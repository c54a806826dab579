"""Scores of predictions: classification, SQuAD answers, ROUGE, BLEU, chrF, error rates and perplexity."""
