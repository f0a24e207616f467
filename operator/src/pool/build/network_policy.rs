use std::net::IpAddr;

use k8s_openapi::api::networking::v1::{
    IPBlock, NetworkPolicy, NetworkPolicyEgressRule, NetworkPolicyIngressRule, NetworkPolicyPeer,
    NetworkPolicyPort, NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::pod::PORT;
use super::{Wanted, label_selector, metadata};
use crate::names::{COMPONENT, NAME};
use crate::pool::dereference::Endpoint;

/// Where clouds hand out credentials to whoever asks from a node.
const METADATA: [(&str, &str); 2] = [("0.0.0.0/0", "169.254.169.254/32"), ("::/0", "fd00:ec2::254/128")];
/// Of frontends and signers.
const CONTROL_PLANE: [i32; 2] = [7777, 7778];

/// Builds with a fixed output fetch from anywhere. Nobody has to reach a builder: only its metrics are open, to the whole
/// cluster, for whoever collects them may be in any namespace and they tell nothing that is secret.
pub fn build(wanted: &Wanted) -> NetworkPolicy {
    let mut egress = vec![
        NetworkPolicyEgressRule { to: None, ports: Some(vec![port("UDP", 53), port("TCP", 53)]) },
        NetworkPolicyEgressRule {
            to: Some(vec![control_plane(wanted)]),
            ports: Some(CONTROL_PLANE.iter().map(|number| port("TCP", *number)).collect()),
        },
    ];
    let collector = wanted.tracing.as_deref().and_then(|endpoint| Endpoint::of(endpoint, 4318));
    let services = [&wanted.database, &wanted.bucket, &collector];
    egress.extend(services.into_iter().flatten().map(|endpoint| NetworkPolicyEgressRule {
        to: Some(vec![peer(endpoint)]),
        ports: Some(vec![port("TCP", i32::from(endpoint.port))]),
    }));
    let internet = METADATA.map(|(all, except)| {
        let same_family = |network: &&String| network.contains(':') == all.contains(':');
        let except =
            [except.to_owned()].into_iter().chain(wanted.forbidden.iter().filter(same_family).cloned());
        NetworkPolicyPeer {
            ip_block: Some(IPBlock { cidr: all.to_owned(), except: Some(except.collect()) }),
            ..NetworkPolicyPeer::default()
        }
    });
    egress.push(NetworkPolicyEgressRule { to: Some(internet.into()), ports: None });
    NetworkPolicy {
        metadata: metadata(wanted),
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(label_selector(wanted)),
            policy_types: Some(vec!["Ingress".to_owned(), "Egress".to_owned()]),
            ingress: Some(vec![NetworkPolicyIngressRule {
                from: Some(vec![anywhere()]),
                ports: Some(vec![port("TCP", PORT)]),
            }]),
            egress: Some(egress),
        }),
    }
}

fn port(protocol: &str, number: i32) -> NetworkPolicyPort {
    NetworkPolicyPort {
        protocol: Some(protocol.to_owned()),
        port: Some(IntOrString::Int(number)),
        end_port: None,
    }
}

fn control_plane(wanted: &Wanted) -> NetworkPolicyPeer {
    let namespace = [("kubernetes.io/metadata.name".to_owned(), wanted.release_namespace.clone())];
    let components = LabelSelectorRequirement {
        key: COMPONENT.to_owned(),
        operator: "In".to_owned(),
        values: Some(vec!["frontend".to_owned(), "signer".to_owned()]),
    };
    NetworkPolicyPeer {
        namespace_selector: Some(LabelSelector {
            match_labels: Some(namespace.into()),
            ..LabelSelector::default()
        }),
        pod_selector: Some(LabelSelector {
            match_labels: Some([(NAME.0.to_owned(), NAME.1.to_owned())].into()),
            match_expressions: Some(vec![components]),
        }),
        ip_block: None,
    }
}

/// A policy knows no names: one with an address is that address, another may be any pod of the cluster, and what is outside is
/// covered by the internet.
fn peer(endpoint: &Endpoint) -> NetworkPolicyPeer {
    let Ok(address) = endpoint.host.parse::<IpAddr>() else { return anywhere() };
    let bits = if address.is_ipv4() { 32 } else { 128 };
    NetworkPolicyPeer {
        ip_block: Some(IPBlock { cidr: format!("{address}/{bits}"), except: None }),
        ..NetworkPolicyPeer::default()
    }
}

/// Any pod of the cluster.
fn anywhere() -> NetworkPolicyPeer {
    NetworkPolicyPeer { namespace_selector: Some(LabelSelector::default()), ..NetworkPolicyPeer::default() }
}
