//! Names that people, the chart and other processes hold on to.

/// Who applies. It never changes: fields applied under another name would be orphaned.
pub const FIELD_MANAGER: &str = "harmonia-ci";
/// Kept on what has a row in the database.
pub const FINALIZER: &str = "ci.harmonia.dev/database";

/// On everything that we make.
pub const NAME: (&str, &str) = ("app.kubernetes.io/name", "harmonia-ci");
/// On everything that we make.
pub const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "harmonia-ci");
/// A selector of everything that we make.
pub const MANAGED: &str = "app.kubernetes.io/managed-by=harmonia-ci";
/// `builder`, `signer`, `frontend` or `evaluator`.
pub const COMPONENT: &str = "app.kubernetes.io/component";
/// Which release it belongs to.
pub const INSTANCE: &str = "app.kubernetes.io/instance";
/// Which pool it belongs to.
pub const POOL: &str = "ci.harmonia.dev/pool";
/// A builder that holds nothing and gets nothing: no disruption budget counts it.
pub const DRAINED: &str = "ci.harmonia.dev/drained";

/// An annotation of pod templates: a change of it makes new pods.
pub const SECRETS_HASH: &str = "ci.harmonia.dev/secrets-hash";
/// An annotation of pod templates: a change of it makes new pods.
pub const CONFIG_HASH: &str = "ci.harmonia.dev/config-hash";
/// An annotation of what we apply: what was applied, so that a field which is wanted no more is found too.
pub const APPLIED_HASH: &str = "ci.harmonia.dev/applied-hash";
