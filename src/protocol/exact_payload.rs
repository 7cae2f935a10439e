//! The signed message of a payment by one signed transfer, as it is on the wire: an EIP-3009 authorization, or a permit.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use crate::{
    eip3009::{Authorization, PaymentSignature},
    permit2::{Permit, Permit2Authorization},
};

/// The payload of a payment by one signed transfer on an EVM chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExactPayload {
    /// The payer's signature over the message.
    pub signature: PaymentSignature,
    /// The message that the payer signed.
    pub authorization: Authorization,
    /// The other fields of the message, if it is a permit.
    pub permit: Option<Permit>,
}

impl ExactPayload {
    /// Creates the payload of a payment by an EIP-3009 authorization.
    pub const fn new(signature: PaymentSignature, authorization: Authorization) -> Self {
        Self { signature, authorization, permit: None }
    }
}

impl Serialize for ExactPayload {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Wire<'a> {
            signature: &'a PaymentSignature,
            #[serde(skip_serializing_if = "Option::is_none")]
            authorization: Option<&'a Authorization>,
            #[serde(skip_serializing_if = "Option::is_none")]
            permit2_authorization: Option<Permit2Authorization>,
        }
        let permit2_authorization =
            self.permit.as_ref().map(|permit| Permit2Authorization::of(&self.authorization, permit));
        let authorization = Some(&self.authorization).filter(|_| self.permit.is_none());
        Wire { signature: &self.signature, authorization, permit2_authorization }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ExactPayload {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Wire {
            signature: PaymentSignature,
            authorization: Option<Authorization>,
            permit2_authorization: Option<Permit2Authorization>,
        }
        let Wire { signature, authorization, permit2_authorization } = Wire::deserialize(deserializer)?;
        match (authorization, permit2_authorization) {
            (Some(authorization), None) => Ok(Self::new(signature, authorization)),
            (None, Some(signed)) => {
                let (authorization, permit) = signed.into_parts();
                Ok(Self { signature, authorization, permit: Some(permit) })
            }
            (None, None) => Err(D::Error::missing_field("authorization")),
            (Some(_), Some(_)) => Err(D::Error::custom("authorization and permit2Authorization exclude each other")),
        }
    }
}
