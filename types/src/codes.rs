//! Macro for enumerations with stable codes and names, so that both are in one place.

/// Declares an enumeration with stable codes and names.
///
/// `Name { Variant = 0 "NAME" }`: one byte, part of the journal format; only in this crate.
/// `Name: i32 { Variant = 1 "NAME" }`: numbers of the contract, also stored in databases. Another
/// type for those of another format.
/// Codes are never renumbered, only added.
#[macro_export]
macro_rules! code_enum {
    ($(#[$meta:meta])* $name:ident { $($variants:tt)+ }) => {
        $crate::code_enum! {
            $(#[$meta])*
            #[derive(PartialOrd, Ord, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
            $name: u8 { $($variants)+ }
        }

        #[cfg(feature = "serde")]
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
                out.serialize_str(self.as_str())
            }
        }
    };
    ($(#[$meta:meta])* $name:ident: $code_type:ident {
        $($(#[$vmeta:meta])* $variant:ident = $code:tt $text:literal),+ $(,)?
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr($code_type)]
        pub enum $name {
            $($(#[$vmeta])* $variant = $code),+
        }

        #[allow(dead_code)] // not every enumeration uses every method
        impl $name {
            /// Every value, in code order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The stable code.
            pub const fn code(self) -> $code_type {
                self as $code_type
            }

            /// The value of a code; `None` for an unassigned one.
            pub const fn from_code(code: $code_type) -> Option<Self> {
                match code {
                    $($code => Some(Self::$variant),)+
                    _ => None,
                }
            }

            /// The name used in contracts, logs and error details.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text),+
                }
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl core::str::FromStr for $name {
            type Err = $crate::TextError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    $($text => Ok(Self::$variant),)+
                    _ => Err($crate::TextError::Unknown),
                }
            }
        }
    };
}
