// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

// Roles, one bit each.

// Token: mint and burn under an operation id.
uint256 constant MINT = 1;
// Token: transfers between holders. Settlement: batches of trades.
uint256 constant SETTLE = 2;
// Token: freezes of addresses and of units.
uint256 constant FREEZE = 4;
// Token: pause.
uint256 constant PAUSE = 8;
// Token: forced transfer with a reason.
uint256 constant ENFORCE = 16;
// Token: mint without an id, for contracts that accept each issue once. Settlement: issues.
uint256 constant ISSUE = 32;
// Token: payment and burn of a distribution, for contracts that accept each part once.
// Redemption: distributions.
uint256 constant REDEEM = 64;
// Registry: the allow-list.
uint256 constant REGISTER = 128;
// Token: document and terms, once.
uint256 constant TERMS = 256;
// Token: units of the holders of a replaced token. Migration: parts.
uint256 constant MOVE = 512;

/// Access control. A role is one bit, and an account may have several. The deployer has none unless
/// the constructor's arguments name it.
///
/// The owner sets roles and has none by being the owner. A new owner accepts in a call of its own,
/// so the contract cannot be given to a wrong address.
///
/// `roleHolders` lists every account with a role: a contract with the known code can be checked for
/// accounts that have too much.
abstract contract Roles {
    uint256 private constant ALL = 1023;
    // The account is in `listed`.
    uint256 private constant LISTED = 1 << 255;

    address public owner;
    address public pendingOwner;
    mapping(address account => uint256 bits) private roleBits;
    address[] private listed;

    event OwnershipTransferStarted(address indexed previousOwner, address indexed newOwner);
    event OwnershipTransferred(address indexed previousOwner, address indexed newOwner);
    event RolesSet(address indexed account, uint256 roles);

    error OnlyOwner();
    error OnlyPendingOwner();
    error MissingRole(address account, uint256 role);
    error UnknownRole(uint256 roles);
    error MalformedRoles();
    error ZeroAddress();

    modifier onlyOwner() {
        if (msg.sender != owner) revert OnlyOwner();
        _;
    }

    modifier onlyRole(uint256 role) {
        if (roleBits[msg.sender] & role == 0) revert MissingRole(msg.sender, role);
        _;
    }

    /// `roles` has one entry per account.
    constructor(address owner_, address[] memory accounts, uint256[] memory roles) {
        if (owner_ == address(0)) revert ZeroAddress();
        if (accounts.length != roles.length) revert MalformedRoles();
        owner = owner_;
        emit OwnershipTransferred(address(0), owner_);
        for (uint256 i = 0; i < accounts.length; ++i) _setRoles(accounts[i], roles[i]);
    }

    function rolesOf(address account) public view returns (uint256) {
        return roleBits[account] & ALL;
    }

    /// All accounts that have or had a role, with their present roles.
    function roleHolders() external view returns (address[] memory accounts, uint256[] memory roles) {
        accounts = listed;
        roles = new uint256[](accounts.length);
        for (uint256 i = 0; i < accounts.length; ++i) roles[i] = rolesOf(accounts[i]);
    }

    /// Replaces the roles of an account; 0 takes all.
    function setRoles(address account, uint256 roles) external onlyOwner {
        _setRoles(account, roles);
    }

    /// The new owner has no right before its `acceptOwnership`. Address 0 withdraws an offer.
    function transferOwnership(address newOwner) external onlyOwner {
        pendingOwner = newOwner;
        emit OwnershipTransferStarted(owner, newOwner);
    }

    function acceptOwnership() external {
        if (msg.sender != pendingOwner) revert OnlyPendingOwner();
        emit OwnershipTransferred(owner, msg.sender);
        owner = msg.sender;
        pendingOwner = address(0);
    }

    function _setRoles(address account, uint256 roles) private {
        if (account == address(0)) revert ZeroAddress();
        if (roles & ~ALL != 0) revert UnknownRole(roles);
        if (roleBits[account] == 0) listed.push(account);
        roleBits[account] = roles | LISTED;
        emit RolesSet(account, roles);
    }
}
