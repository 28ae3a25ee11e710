output "url" {
  description = "What HOLDFAST_REGISTRY is set to."
  value       = var.prefix == "" ? "s3://${var.bucket}" : "s3://${var.bucket}/${var.prefix}"
}

output "bucket_arn" {
  description = "ARN of the bucket."
  value       = aws_s3_bucket.registry.arn
}

output "policy_arns" {
  description = "By role, the ARN of its policy."
  value       = { for role, policy in aws_iam_policy.role : role => policy.arn }
}

output "policy_documents" {
  description = "By role, the JSON of its policy, for principals that are managed elsewhere."
  value       = module.policies.roles
}
