//! The conditions in the status of the custom resources, and why they are as they are.
//!
//! People wait for the types (`kubectl wait --for=condition=Ready`) and alerts match the reasons: neither is renamed.

/// Everything is as the spec wants it. On both kinds.
pub const READY: &str = "Ready";
/// Something is under way that will end by itself, such as a rollout. On pools.
pub const PROGRESSING: &str = "Progressing";
/// The operator can talk to PostgreSQL. On pools.
pub const DATABASE_REACHABLE: &str = "DatabaseReachable";
/// The operator sees cordons and taints of Kubernetes nodes, so that builders drain before they are evicted. On pools.
pub const NODES_WATCHED: &str = "NodesWatched";
/// The queue knows the project as the spec describes it. On projects.
pub const SYNCED: &str = "Synced";

/// Why a condition is true, false or unknown.
pub mod reason {
    /// Every builder that there should be is ready, or there should be none.
    pub const AVAILABLE: &str = "Available";
    /// Some builders are not ready yet.
    pub const ROLLING_OUT: &str = "RollingOut";
    /// Nothing is under way.
    pub const SETTLED: &str = "Settled";
    /// A pod cannot be scheduled or started; the message has the scheduler's or kubelet's words.
    pub const PODS_PENDING: &str = "PodsPending";
    /// The API server refused an object that the pool needs; the message has its words.
    pub const CREATE_FAILED: &str = "CreateFailed";
    /// The spec cannot be followed although the API server took it; the message says what to change.
    pub const INVALID_SPEC: &str = "InvalidSpec";
    /// A Secret that is referred to does not exist.
    pub const SECRET_MISSING: &str = "SecretMissing";
    /// A Secret that is referred to does not hold what it should; the message says what that is.
    pub const INVALID_SECRET: &str = "InvalidSecret";
    /// The frontend does not answer yet which keys to trust.
    pub const WAITING_FOR_KEYS: &str = "WaitingForKeys";
    /// The database has not been reached since the operator started.
    pub const WAITING_FOR_DATABASE: &str = "WaitingForDatabase";
    /// The database cannot be reached; builders go on, their number is frozen.
    pub const DATABASE_UNREACHABLE: &str = "DatabaseUnreachable";
    /// Nodes are watched.
    pub const WATCHED: &str = "Watched";
    /// The operator has no right to watch nodes: builders hear of a drain when they are evicted.
    pub const FORBIDDEN: &str = "Forbidden";
    /// The database answers.
    pub const CONNECTED: &str = "Connected";
    /// Changes are not acted upon while `spec.paused` or the annotation `ci.harmonia.dev/reconcile: disabled` is set.
    pub const PAUSED: &str = "Paused";
    /// The queue knows the project as it is.
    pub const SYNCED: &str = "Synced";
    /// The queue has a project of that name which no Project keeps; the message says what to do.
    pub const NAME_TAKEN: &str = "NameTaken";
    /// The project names a pool that does not exist.
    pub const UNKNOWN_POOL: &str = "UnknownPool";
}
