"""Proofs that a worker computes what another one does: of first steps and evaluations, and audits."""
